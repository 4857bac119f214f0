"""ttmdsl"""
